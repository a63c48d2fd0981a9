"""Models whose prompts an engine makes with code of its own, whatever chat template their folder has.

Their template would give other ids than the engine's in silence, so they are refused by name at start. SGLang 0.5.23
tells them by `config.json` (`chat_encoding.py`, `python_chat_template.py`, `conversation.py` and `serving_chat.py`);
vLLM 0.32 has renderers for the first five, too. A folder without `config.json` is told by its template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BY_ARCHITECTURE: Mapping[str, str] = {
    "DeepseekV4": "DeepSeek V4",
    "KimiK3": "Kimi K3",
    "Inkling": "Inkling",
    "Glm5Next": "GLM-5.3 Flash",
}
"""Parts of the names in `architectures`."""

_BY_TYPE: Mapping[str, str] = {
    "deepseek_v4": "DeepSeek V4",
    "deepseek_v41": "DeepSeek V4.1",
    "kimi_k3": "Kimi K3",
    "minimax_m3_vl": "MiniMax M3",
    "internvl_chat": "InternVL 2.5",
    "deepseek_vl_v2": "DeepSeek VL2",
    "multi_modality": "Janus Pro",
    "phi4mm": "Phi 4 Multimodal",
    "minicpmv": "MiniCPM-V",
    "minicpmo": "MiniCPM-o",
    "moss_vl": "MOSS-VL",
    "deepseek-ocr": "DeepSeek OCR",
    "unlimited-ocr": "Unlimited OCR",
    "paddleocr_vl": "PaddleOCR-VL",
}
"""`model_type`."""

_BY_WORDS: Mapping[tuple[str, ...], str] = {
    ("drop_thinking",): "DeepSeek V4",
    ("thinking_effort", "image_prompts"): "Kimi K3",
    ("[gMASK]<sop>", "Reasoning Effort:", "<arg_key>"): "GLM-5.3",
}
"""What only the template of such a model has."""

_TOGGLE = "enable_thinking"
"""GLM's other templates have it."""


def rendered_elsewhere(config: Mapping[str, Any], source: str) -> str | None:
    """The model's name; None for one whose chat template engines use. `source` is the template's text."""
    kind, architectures = config.get("model_type"), config.get("architectures")
    if isinstance(kind, str) and kind in _BY_TYPE:
        return _BY_TYPE[kind]
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    for part, name in _BY_ARCHITECTURE.items():
        if part in first:
            return name
    for words, name in _BY_WORDS.items():
        if all(word in source for word in words) and not (name == "GLM-5.3" and _TOGGLE in source):
            return name
    return None
