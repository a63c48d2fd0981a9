"""Clients that look for their model before they ask, and those that try a WebSocket first."""

from __future__ import annotations

import anthropic
import openai
import pytest

from integration.places import Places
from integration.stand import Stand, error_of, standing


def test_one_model_by_its_id(stand: Stand, places: Places) -> None:
    """As both SDKs ask for it and read it, also an id with slashes."""
    with standing(places.new("slashes"), "--model", "org/model-1") as slashes:
        for where, name in ((stand, "simulator"), (slashes, "org/model-1")):
            [listed] = where.get("/v1/models")["data"]
            talk = where.talk()
            for base in ("", talk.path):
                url = f"{where.server.base_url}{base}"
                with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
                    assert client.models.retrieve(name).to_dict() == listed
                    with pytest.raises(openai.NotFoundError, match="no model has this id"):
                        client.models.retrieve("other")
                with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as claude:
                    model = claude.models.retrieve(name)
                    assert (model.id, model.type, model.display_name) == (name, "model", name)
                    assert model.created_at.timestamp() == listed["created"]
                    with pytest.raises(anthropic.NotFoundError) as missing:
                        claude.models.retrieve("other")
                    assert missing.value.type == "not_found_error"
                for spelled in (name, name.replace("/", "%2F")):
                    assert where.get(f"{base}/v1/models/{spelled}") == listed
                assert where.get(f"{base}/v1/models/")["data"] == [listed]
    assert error_of(stand.http.get("/sessions/none/v1/models/simulator")) == (404, "session_not_found")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
def test_a_websocket_is_told_to_use_http(stand: Stand, path: str) -> None:
    """Codex goes on with POST at a 426; at any other status it tries again for seconds."""
    talk = stand.talk()
    offer = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    for base in ("", talk.path, "/sessions/none"):
        reply = stand.http.get(f"{base}{path}", headers=offer)
        assert (error_of(reply)[0], reply.headers["upgrade"]) == (426, "HTTP/1.1")
        assert stand.http.get(f"{base}{path}").status_code == 405
    talk.say("Hello", headers=offer)
