"""A session of completions from a client's side."""

from __future__ import annotations

from typing import Any

import httpx

from integration.stand import Stand, Talk
from integration.tito import output_of


class Writing(Talk):
    """A session of completions: `text` is what was asked and answered so far."""

    def __init__(self, stand: Stand, **body: Any) -> None:
        super().__init__(stand, stand.talk(**body).id)
        self.stand = stand
        self.url = f"{self.path}/v1/completions"
        self.text = ""
        self.ids: list[int] = []

    def ask(self, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "simulator", "prompt": prompt, "max_tokens": 8, **fields}
        return self.stand.http.post(self.url, json=body, headers=headers)

    def write(self, text: str, **fields: Any) -> httpx.Response:
        """A turn that must succeed, with more text."""
        prompt = self.text + text
        response = self.ask(prompt, **fields)
        assert response.status_code == 200, response.text
        self.text = prompt + response.json()["choices"][0]["text"]
        return response

    def add_ids(self, *ids: int, **fields: Any) -> httpx.Response:
        prompt = [*self.ids, *ids]
        response = self.ask(prompt, **fields)
        assert response.status_code == 200, response.text
        self.ids = prompt + output_of(response.json())
        return response

    def asked(self) -> list[dict[str, Any]]:
        return [one["body"] for one in self.stand.engine_requests(self.id, "/v1/completions")]
