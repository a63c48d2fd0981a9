"""One sound reply in, one mutated reply out, decided by a seeded generator alone."""

from __future__ import annotations

import random

from tests.tools.mutated_replies import byte_mutations, json_mutations, payload_mutations, tree

CONTROL = "none (control)"
SEVERAL = "two or three of these"
CLASSES = (
    CONTROL,
    *json_mutations.MUTATIONS,
    *payload_mutations.MUTATIONS,
    *byte_mutations.MUTATIONS,
    SEVERAL,
)

CONTROL_SHARE = 0.02
SEVERAL_SHARE = 0.2
WEIGHTS = (5, 4, 3)
"""How often JSON, payload and byte mutations are drawn."""

SEPARATORS = ((", ", ": "), (",\n  ", ": "), (" ,\t", " :"), (",\r\n", ":"))


def mutate(rng: random.Random, body: bytes) -> tuple[bytes, str]:
    """The mutated reply and its class, one of CLASSES."""
    if rng.random() < CONTROL_SHARE:
        return body, CONTROL
    families = (json_mutations.MUTATIONS, payload_mutations.MUTATIONS, byte_mutations.MUTATIONS)
    times = rng.choice((2, 2, 3)) if rng.random() < SEVERAL_SHARE else 1
    names = [rng.choice(list(rng.choices(families, WEIGHTS)[0])) for _ in range(times)]
    in_tree = {**json_mutations.MUTATIONS, **payload_mutations.MUTATIONS}
    if any(name in in_tree for name in names):
        root = tree.parse(body)
        for name in names:
            if name in in_tree:
                in_tree[name](rng, root)
        comma, colon = rng.choice(SEPARATORS) if rng.random() < 0.2 else (",", ":")
        body = tree.to_bytes(tree.render(root, comma, colon))
    for name in names:
        if name in byte_mutations.MUTATIONS:
            body = byte_mutations.MUTATIONS[name](rng, body)
    return body, names[0] if times == 1 else SEVERAL
