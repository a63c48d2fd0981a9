"""Mutants: the service's code with one fault each, made from patterns, and which family of tests finds which of them.

    python -m tests.tools.mutants                          how many faults each pattern makes in each area
    python -m tests.tools.mutants --choose 200             writes `list.txt` anew: a sample of all areas and patterns
    python -m tests.tools.mutants --show ID                the fault as a diff
    python -m tests.tools.mutants --run simulation --into before.txt    continues where the file ends
    python -m tests.tools.mutants --report before.txt

`--tree` names another checkout. Its code is never changed: each job has a copy of it.
"""
