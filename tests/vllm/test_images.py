"""Images in a prompt, under vLLM's scheduler: they are in the hashes of blocks, so in our keys.

A prompt of 64 tokens has an image's placeholders at 20 to 35. Chunks before the image are shared by all images, those
from it on by prompts with the same one.
"""

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

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
    place = PlaceholderRange(offset=IMAGE_START, length=IMAGE_TOKENS)
    images = (
        [MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)] if image else None
    )
    engine.submit(TOKENS, max_tokens=2, mm_features=images)
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
