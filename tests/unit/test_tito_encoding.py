"""Long text that is encoded in pieces has the ids that it has whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from app.tito.prompts import Encoder
from tests.tools.tito_check import tokenizers

ADDED = ("<|im_start|>", "<|im_end|>", "<think>", "<|user|>", "[gMASK]", "<|im_start|", "im_start|>")
PIECES = st.sampled_from((*ADDED, "a word", " ", "\n", "  two\n\n", "naïve", "1234", "<", "|>", "é"))


@pytest.fixture(scope="module", params=["qwen3", "glm-4.5"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("trl")
    folder = tokenizers.save(tmp_path_factory.mktemp("tokenizer"), request.param)
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def whole(backend: Any, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


@settings(max_examples=cases(600), deadline=None)
@given(text=st.lists(PIECES, max_size=40).map("".join), piece=st.integers(1, 30))
def test_pieces_are_the_whole(backend: Any, text: str, piece: int) -> None:
    assert Encoder(backend, piece).encode(text).tolist() == whole(backend, text)


@settings(max_examples=cases(400), deadline=None)
@given(text=st.lists(PIECES, max_size=40).map("".join), piece=st.integers(1, 30), data=st.data())
def test_tokens_that_take_from_their_neighbours_are_not_cut_at(text: str, piece: int, data: st.DataObject) -> None:
    odd = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    odd.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    flags = st.fixed_dictionaries(
        {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
    )
    odd.add_tokens([AddedToken(content, **data.draw(flags)) for content in ADDED])
    assert Encoder(odd, piece).encode(text).tolist() == whole(odd, text)
