"""Names of rLLM's sessions as ids, and back."""

from __future__ import annotations

import random
import re

import pytest

from app.domain.patterns import ID
from app.features.rllm.rules import id_of, name_of


@pytest.mark.parametrize(
    ("name", "session_id"),
    [
        ("task-17:0", "task-17:0"),
        ("a.b_c", "a.b_c"),
        ("harbor/hello-world:0", "harbor..2Fhello-world:0"),
        ("a b", "a..20b"),
        ("ü", "..C3..BC"),
        (".", "..2E"),
        ("a..2Fb", "a..2E..2E2Fb"),
    ],
)
def test_a_name_is_written_as_an_id_and_read_back(name: str, session_id: str) -> None:
    assert id_of(name) == session_id
    assert name_of(session_id) == name


def test_no_two_names_have_one_id() -> None:
    names = {"".join(random.Random(seed).choices("./2F:a ", k=1 + seed % 8)) for seed in range(20_000)}
    ids = {id_of(name): name for name in names}
    assert len(ids) == len(names)
    assert all(re.fullmatch(ID, one) and one.strip(".") and name_of(one) == name for one, name in ids.items())


def test_long_names_differ_in_their_ids() -> None:
    ids = {id_of("x/" * 200 + end) for end in ("a", "b")}
    assert len(ids) == 2
    assert all(re.fullmatch(ID, one) for one in ids)
