"""The random comparison with a template's own rendering: it holds, and it finds what is broken on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tokenizers import needs_templates

from tests.tools.tito_check import tokenizers
from tests.tools.tito_check.__main__ import check
from tests.tools.tito_check.check import Check
from tests.tools.tito_check.conversations import KINDS

pytestmark = needs_templates

FAMILIES = (*tokenizers.TEMPLATES,)


def checked(tmp_path: Path, family: str, conversations: int) -> Check:
    source = tokenizers.template(tokenizers.TEMPLATES[family])
    assert source is not None
    compared = check(tmp_path, source)
    for number in range(conversations):
        for what in KINDS:
            compared.conversation(f"unit/{number}", what)
    return compared


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations_are_what_the_template_renders(tmp_path: Path, family: str) -> None:
    compared = checked(tmp_path, family, 2)
    assert compared.turns - compared.refused.total() > 3
    assert compared.wrong == []
