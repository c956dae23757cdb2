"""Mutants of the core, and the tests that kill them.

    PYTHONPATH=tests python -m mutants --seed 1 --count 60 [--root CHECKOUT]

A mutant differs from the checkout in one node of one file of the core. Mutants are drawn by a seed, uniformly over all
places that an operator of `places.py` applies to. Two runs of tests decide, each ended by its first failure:

1. The quick suite runs once in a copy in which each drawn place notes the test that is running (`notes.py`), also in
   the processes that a test starts. Tests that fail there are not used.
2. For each mutant, tests of its module's name run, and the quickest that pass its place. If it survives, the other
   tests that pass its place run, the quickest first, up to `--patience` seconds. A place that is passed during an
   import has the tests of its room and `tests/covering` as its tests.

A mutant whose tests all pass survives. An equivalent mutant survives too: survivors are listed, and people judge.

Libraries for this were tried on paper. mutmut 3 puts all mutants of a function side by side in its file and chooses one
by a trampoline, so it mutates no code outside functions, changes what `torch.export` and the hashes of the user's code
see, draws no sample, and finds a mutant's tests by calls within pytest's own process only, while most tests here start
others. cosmic-ray changes the working tree, and runs one command for all mutants. mutatest draws a sample by a
seed, but by one command, through bytecode caches that processes here do not write; its last release is of 2022.
"""
