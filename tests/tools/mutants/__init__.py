"""Mutants: the service's code with one fault each, and which commands find which of them.

    python -m tests.tools.mutants --into FILE -- python -m tests.tools.simulation --schedules 120
    python -m tests.tools.mutants --into FILE --unfound -- pytest -x --tb=no tests/contract
    python -m tests.tools.mutants --report FILE

Each line of `list.txt` is a fault: a file, an area, a text that is in the file once, what stands in its place, and,
where nobody could see the fault, why. A command finds it by failing. Results are appended to FILE, and what stands
there is not run again. `--tree` names another checkout, whose code is broken. Neither is changed: each job has a copy.
"""
