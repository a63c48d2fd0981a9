"""OpenAI text completions: a prompt as text or as token ids."""

from __future__ import annotations

from app.domain.continued_body import ContinuedBody
from app.domain.request import CompletionRequest
from app.protocols.chat import Chat
from app.protocols.completions.parse import parse_completion
from app.protocols.completions.schema import EXAMPLE, REQUEST


class Completions(Chat):
    name = "completions"
    route = "/v1/completions"
    has_layouts = False
    schema = REQUEST
    example = EXAMPLE

    def parse(
        self, body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None
    ) -> CompletionRequest:
        return parse_completion(body, has_few_values)


PROTOCOL = Completions()
