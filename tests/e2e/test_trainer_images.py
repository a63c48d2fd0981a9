"""Rows with images in the trainers' own code: their processors make as many tokens of the images as the row has."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from integration.stand import Stand, Talk, standing

from ops.simulator.tokenizer_files import write

ABSENT = "trl or verl is not installed: see 'Trainers' packages' in CONTRIBUTING.md"
SIZES = ((84, 112), (140, 56))
"""Of the images, in pixels; Qwen2-VL makes a token of 28 x 28."""

GRIDS = [[1, 8, 6], [1, 4, 10]]
"""Their patches of 14 x 14 pixels: in time, height and width."""

PLACEHOLDERS = [12, 10]


@pytest.fixture
def stand(tmp_path: Path) -> Any:
    with standing(tmp_path / "server") as made:
        yield made


@pytest.fixture
def processor(tmp_path: Path) -> Any:
    """Qwen2-VL's without its part for video, which needs torchvision, and with the simulator's tokenizer."""
    for package in ("torch", "transformers", "PIL"):
        pytest.importorskip(package, reason=ABSENT)
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    class ImageProcessor(Qwen2VLProcessor):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

    write(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    return ImageProcessor(Qwen2VLImageProcessorPil(), tokenizer, tokenizer.chat_template)


def image(size: tuple[int, int]) -> dict[str, Any]:
    """A PNG inline, as a chat's part."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def asks(text: str, *sizes: tuple[int, int]) -> dict[str, Any]:
    return {"role": "user", "content": [*map(image, sizes), {"type": "text", "text": text}]}


def row_of(talk: Talk, shape: str) -> dict[str, Any]:
    [row] = talk.rows(shape=shape, images="inline")
    return row


def placeholders(processor: Any, ids: list[int]) -> int:
    return ids.count(processor.image_token_id)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_verl_makes_inputs_of_the_images_of_every_turn(stand: Stand, processor: Any) -> None:
    pytest.importorskip("verl.experimental.agent_loop.agent_loop", reason=ABSENT, exc_type=ImportError)
    import torch
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker

    talk = stand.talk()
    talk.add(asks("What is it?", SIZES[0]), sim={"tool_calls": False})
    talk.add(asks("And this?", SIZES[1]), sim={"tool_calls": False})
    row = row_of(talk, "verl")
    output = AgentLoopOutput(**row)
    ids = row["prompt_ids"] + row["response_ids"]
    assert placeholders(processor, row["prompt_ids"]) == PLACEHOLDERS[0]
    worker: Any = SimpleNamespace(
        processor=processor, tokenizer=processor.tokenizer, _get_mm_processor_kwargs=lambda audios: {}
    )
    inputs = AgentLoopWorker._compute_multi_modal_inputs(worker, output, torch.tensor([ids]))
    assert inputs["image_grid_thw"].tolist() == GRIDS
    assert placeholders(processor, ids) == sum(PLACEHOLDERS)
    assert int(inputs["image_grid_thw"].prod(-1).sum()) // processor.image_processor.merge_size**2 == sum(PLACEHOLDERS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_trl_makes_the_rows_ids_of_the_images(stand: Stand, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images are a column of its data set, which `datasets` decodes; Qwen2-VL compares them with the row's ids."""
    for package in ("datasets", "trl"):
        pytest.importorskip(package, reason=ABSENT)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.data_utils import apply_chat_template, prepare_multimodal_messages

    asked = asks("Which is larger?", *SIZES)
    prompt = [{**asked, "content": [{"type": "image"}, {"type": "image"}, asked["content"][-1]]}]
    talk = stand.talk()
    talk.add(asked, sim={"tool_calls": False, "completion_tokens": 6})
    row = row_of(talk, "trl")
    for images in (row["images"], decoded := _decoded(row["images"])):
        messages = prepare_multimodal_messages(prompt, images=images)
        text = apply_chat_template({"prompt": messages}, processor)["prompt"]
        made = processor(images=[images], text=[text], return_tensors="pt")
        assert made["input_ids"][0].tolist() == row["prompt_ids"]
        assert made["image_grid_thw"].tolist() == GRIDS
    assert [one.size for one in decoded] == list(SIZES)
    assert placeholders(processor, row["prompt_ids"]) == sum(PLACEHOLDERS)


def _decoded(images: list[str]) -> list[Any]:
    from datasets import Dataset, Image, List

    found: list[Any] = Dataset.from_list([{"images": images}]).cast_column("images", List(Image()))[0]["images"]
    return found
