"""A plan whose workers are far from each other: a proxy between them delays, and a layer takes its time."""
