"""Images in a prompt, in a real engine: what the host brings back of an image is that image's.

A model of Idefics 3's shape reads 70 tokens, an image, 100 tokens, another image, and 100 tokens. What comes before an
image is shared by all images in its place.
"""

import numpy as np
import pytest
from PIL import Image

from tests.vllm.models import IMAGE, IMAGE_SIDE, IMAGE_TOKENS, save_idefics3, some_tokens
from tests.vllm.real_cache import CachedEngine, Copies
from tests.vllm.real_engine import BLOCK, SHOWN, TOLERANCE, RealEngine, differences

# Seeds of pixels
CAT = 1
DOG = 2
BIRD = 3
PAIRS = [(CAT, DOG), (DOG, CAT), (CAT, BIRD)]
PARTS = [[token % IMAGE for token in some_tokens(count, ("part", count))] for count in (70, 100, 101)]
PROMPT = [*PARTS[0], IMAGE, *PARTS[1], IMAGE, *PARTS[2]]
AROUND = 3  # tokens that the processor puts around an image
BEFORE_FIRST = len(PARTS[0]) // BLOCK * BLOCK
BEFORE_SECOND = (len(PARTS[0]) + IMAGE_TOKENS + AROUND + len(PARTS[1])) // BLOCK * BLOCK
ALL = (len(PROMPT) - 2 + 2 * (IMAGE_TOKENS + AROUND) - 1) // BLOCK * BLOCK
SEES = dict(skip_tokenizer_init=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def expected(folder):
    """By their images: the answers of an engine that has no host, and has seen nothing of the others."""
    with RealEngine(folder, **SEES) as engine:
        return {images: _forgetting(engine, images) for images in PAIRS}


def _forgetting(engine, images):
    (answer,) = see(engine, images)
    engine.forget()
    return answer


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def see(engine, *pairs, called=None):
    """Answers to the prompt with each pair of images, sent at once; vLLM makes names of pixels unless they are given
    as `called`."""
    names = {"multi_modal_uuids": {"image": called}} if called else {}
    asked = [{"multi_modal_data": {"image": [picture(seed) for seed in pair]}} | names for pair in pairs]
    submitted = [engine.submit(PROMPT, more=each) for each in asked]
    engine.rest()
    return [engine.finished.pop(each) for each in submitted]


@pytest.mark.parametrize("offload", ["eager", "lazy"])
def test_an_image_is_brought_back_and_never_anothers(folder, expected, offload):
    with CachedEngine(folder, offload=offload, engine=SEES) as engine:
        answers = []
        for images in (PAIRS[0], *PAIRS):
            answers += see(engine, images)
            engine.flood()
        together = see(engine, *PAIRS)
        found = see(engine, PAIRS[0])
        engine.check_nothing_leaked()
    loaded = [answer.loaded_tokens for answer in answers]
    assert loaded == [0, ALL, BEFORE_FIRST, BEFORE_SECOND], "the same, another first image, another second one"
    assert all(answer.cached_tokens == ALL for answer in together) and together[0].loaded_tokens == ALL
    assert (found[0].loaded_tokens, found[0].cached_tokens) == (0, ALL)
    truth = [expected[images] for images in (PAIRS[0], *PAIRS, *PAIRS, PAIRS[0])]
    assert max(differences(answers + together + found, truth)) <= TOLERANCE


def test_images_matter(expected):
    """The control: an answer that were another's would differ."""
    for images, other in ((PAIRS[0], PAIRS[1]), (PAIRS[0], PAIRS[2])):
        assert differences([expected[images]], [expected[other]])[0] > SHOWN


def test_another_image_under_the_same_name_shows(folder, expected):
    """The control of names: images that they do not distinguish are loaded for each other."""
    with CachedEngine(folder, offload="eager", engine=SEES) as engine:
        for images in PAIRS[:2]:
            (answer,) = see(engine, images, called=["one", "two"])
            engine.flood()
    assert answer.loaded_tokens == ALL
    assert differences([answer], [expected[PAIRS[1]]])[0] > TOLERANCE


def test_one_damaged_block_of_a_load_shows(folder, expected):
    """The control of bytes."""
    with CachedEngine(folder, offload="eager", copies=Copies(damaged="prefix-0"), engine=SEES) as engine:
        see(engine, PAIRS[0])
        engine.flood()
        (answer,) = see(engine, PAIRS[0])
    assert answer.loaded_tokens == ALL
    assert differences([answer], [expected[PAIRS[0]]])[0] > TOLERANCE
