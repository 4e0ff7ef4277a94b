"""Images in a prompt, under vLLM's scheduler: they are in the hashes of blocks, so in our keys.

A prompt of 64 tokens has an image's placeholders at 20 to 35. Chunks before the image are shared by all images, those
from it on by prompts with the same one.
"""

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from tests.vllm.engine import BLOCK, Engine

IMAGE_START = 20
IMAGE_TOKENS = 16
PROMPT = 64
PLACEHOLDER = 7
TOKENS = [*range(100, 100 + IMAGE_START), *[PLACEHOLDER] * IMAGE_TOKENS]
TOKENS += range(200, 200 + PROMPT - len(TOKENS))


@pytest.fixture(params=["eager", "lazy"])
def engine(tmp_path, request):
    engine = Engine(tmp_path, offload=request.param, device_blocks=60, host_blocks=1000, slowest=1)
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
    engine.scheduler.max_num_encoder_input_tokens = 1000
    return engine


def see(engine: Engine, image: str | None) -> tuple[int, int]:
    """Tokens found on the device, and with the host, of the prompt with this image."""
    id = f"{image} {engine.counts['submitted']}"
    engine.counts["submitted"] += 1
    place = PlaceholderRange(offset=IMAGE_START, length=IMAGE_TOKENS)
    images = (
        [MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)] if image else None
    )
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    request = Request(id, list(TOKENS), sampling, None, mm_features=images, block_hasher=engine._hasher)
    engine.requests[id] = request
    engine.model.begin(request)
    engine.scheduler.add_request(request)
    engine.admitted.clear()
    engine.drain()
    return engine.admitted[0]


def forget(engine: Engine) -> None:
    for seed in range(12):
        engine.run([400 + seed * 3] * 60, max_tokens=1)


def test_the_same_image_is_found_again_and_another_one_is_not(engine):
    assert see(engine, "a cat") == (0, 0)
    forget(engine)
    assert see(engine, "a cat") == (0, PROMPT - BLOCK)
    forget(engine)
    assert see(engine, "a dog") == (0, IMAGE_START)
    assert see(engine, None) == (IMAGE_START, IMAGE_START), "nor is the text, without any image"
