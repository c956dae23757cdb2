"""Ways to train the same workload; each module's `train(workload)` returns a `Timing`."""
