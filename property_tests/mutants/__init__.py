"""Mutation testing: put one fault into a copy of the tree, run the tests, print each fault that was not seen.

    python -m property_tests.mutants --seed 1 --count 300

`subjects.py` names the code and the tests that judge it, `faults.py` finds the possible faults of each statement,
`sample.py` draws from that and finds a list again after code has moved, `trial.py` runs the tests that cover a fault.

Written here because no library samples, drops statements and knows a mutant again in another file: mutmut, the nearest
(coverage first, forks, limits on processor time), has none of the three and numbers mutants by module; cosmic-ray runs
one command for all mutants under a limit of wall time.
"""
