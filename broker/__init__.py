"""How a microbatch travels, and who holds it."""
