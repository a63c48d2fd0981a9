"""Mutants: the service's code with one fault each, made from patterns, and which family of tests finds which of them.

    python -m tests.tools.mutants                          how many faults each pattern makes in each area
    python -m tests.tools.mutants --choose 225             writes `list.txt` anew: a sample of all areas and patterns
    python -m tests.tools.mutants --show ID                the fault as a diff
    python -m tests.tools.mutants --trace unit             notes which functions the family's modules call
    python -m tests.tools.mutants --run unit --into FILE --unfound    goes on where the file ends
    python -m tests.tools.mutants --report FILE

`list.txt` has for each fault its id, its area, what it changes, and, for one that changes nothing, why. `--tree` names
another checkout, whose code is broken instead of this one's. Neither is ever changed: each job has a copy.
"""
