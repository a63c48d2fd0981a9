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

Messages = list[dict[str, Any]]

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
def test_trl_trains_a_step_on_rows_with_images(
    stand: Stand, processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images are a column of its data set, which `datasets` decodes; Qwen2-VL compares them with the row's ids."""
    for package in ("datasets", "trl"):
        pytest.importorskip(package, reason=ABSENT)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset, Image, List
    from trl.data_utils import apply_chat_template, prepare_multimodal_messages

    asked = asks("Which is larger?", *SIZES)
    prompt = [{**asked, "content": [{"type": "image"}, {"type": "image"}, asked["content"][-1]]}]
    group: list[dict[str, Any]] = []
    for _ in range(2):
        talk = stand.talk()
        talk.add(asked, sim={"tool_calls": False, "completion_tokens": 6})
        group.append(row_of(talk, "trl"))
    for images in (group[0]["images"], decoded := _decoded(group[0]["images"])):
        messages = prepare_multimodal_messages(prompt, images=images)
        text = apply_chat_template({"prompt": messages}, processor)["prompt"]
        made = processor(images=[images], text=[text], return_tensors="pt")
        assert made["input_ids"][0].tolist() == group[0]["prompt_ids"]
        assert made["image_grid_thw"].tolist() == GRIDS
    assert [one.size for one in decoded] == list(SIZES)
    assert placeholders(processor, group[0]["prompt_ids"]) == sum(PLACEHOLDERS)
    data = Dataset.from_list([{"prompt": prompt, "images": group[0]["images"]}]).cast_column("images", List(Image()))
    assert _trained(group, data, processor, tmp_path)


def _decoded(images: list[str]) -> list[Any]:
    from datasets import Dataset, Image, List

    found: list[Any] = Dataset.from_list([{"images": images}]).cast_column("images", List(Image()))[0]["images"]
    return found


def _trained(group: list[dict[str, Any]], data: Any, processor: Any, folder: Path) -> bool:
    """One optimiser step of a tiny Qwen2-VL on a group of two: has it changed?"""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from trl import GRPOConfig, GRPOTrainer

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        return {name: [row[name] for row in group] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}

    def score(completions: list[Any], **columns: Any) -> list[float]:
        return [1.0, 0.0]

    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(**_tiny(processor)))
    embedded = model.get_input_embeddings().weight
    before = embedded.detach().clone()
    config = GRPOConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1.0,
    )
    GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=score,
        train_dataset=data,
        processing_class=processor,
        rollout_func=rollout,
    ).train()
    return not bool((before == embedded.detach()).all())


def _tiny(processor: Any) -> dict[str, Any]:
    """A configuration of Qwen2-VL: one layer, eight wide."""
    return {
        "text_config": {
            "vocab_size": len(processor.tokenizer),
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        },
        "vision_config": {"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 1, "mlp_ratio": 1},
        "image_token_id": processor.image_token_id,
        "vision_start_token_id": processor.tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": processor.tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
