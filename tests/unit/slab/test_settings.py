"""A user's settings of a tier, and the number of slots that follows."""

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.slab.settings import FileTier, parse_file_tier
from tests.unit.slab.small_slab import BLOCK, open_slab

SLOT = BLOCK + 128
FEW = 64 << 10  # of a rank, for small files


def test_a_tier_is_named_in_one_text():
    assert parse_file_tier("file:/nvme/kv:64GiB") == FileTier("/nvme/kv", 64 << 30)
    assert parse_file_tier("file:/odd:path/kv:1000") == FileTier("/odd:path/kv", 1000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("redis://host:6379", "unknown kind of tier 'redis'.*known is file"),
        ("/nvme/kv", "unknown kind"),
        ("", "unknown kind"),
        ("file:64GiB", "file:PATH:SIZE"),
        ("file::64GiB", "file:PATH:SIZE"),
        ("file:/nvme/kv", "file:PATH:SIZE"),
        ("file:/nvme/kv:", "a size is"),
        ("file:/nvme/kv:much", "a size is.*'much'"),
        ("file:/nvme/kv:-1GiB", "a size is"),
        ("file:/nvme/kv:0", "at least 1"),
        ("file:/nvme/kv:1e9", "a size is"),
    ],
)
def test_a_text_that_names_no_tier_is_refused_with_the_right_form(text, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_file_tier(text)


def test_sizes_have_binary_and_decimal_units():
    assert [parse_bytes(text) for text in ("7", "7B", "1KiB", "1kb", "2 MiB", "1.5TB", "1P")] == [
        7,
        7,
        1024,
        1000,
        2 << 20,
        1_500_000_000_000,
        10**15,
    ]


@pytest.mark.parametrize("nbytes", ["64GiB", 0, -1, 1.5, True, None])
def test_a_size_is_a_whole_number_of_bytes(nbytes):
    with pytest.raises(ConfigurationError, match="whole number of bytes"):
        FileTier("/nvme", nbytes)


@pytest.mark.parametrize(
    "fields", [{"hash": "xxh3_128"}, {"offload": "sometimes"}, {"flush_seconds": -1.0}, {"flush_seconds": float("nan")}]
)
def test_other_settings_are_checked_too(fields):
    with pytest.raises(ConfigurationError):
        FileTier("/nvme", 1, **fields)


@pytest.mark.parametrize("fields", [{"model": ""}, {"revision": 7}, {"revision": "1", "weights": "/models/tiny"}])
def test_fields_that_identify_no_weights_are_refused(fields):
    with pytest.raises(ConfigurationError, match=r"of a tier is a text|leave one of them out"):
        FileTier("/nvme", 1, **fields)


def test_a_path_is_a_text():
    with pytest.raises(ConfigurationError, match="path of a tier is a text"):
        FileTier("", 1)


@pytest.mark.parametrize(("engine", "folder"), [(0, "/nvme"), (2, "/nvme/engine-2")])
def test_each_engine_under_data_parallelism_has_a_folder(engine, folder):
    assert FileTier("/nvme", 1, engine=engine).folder == folder


# Slots


def slots(nbytes, ranks=1, host_blocks=2):
    return FileTier("/nowhere", nbytes).slots(BLOCK, host_blocks, ranks)


def test_records_and_small_files_are_in_the_bound():  # S8.18
    assert slots(10 * SLOT + FEW) == 10
    assert slots(10 * SLOT + FEW - 1) == 9


def test_all_files_on_the_disk_are_within_the_bound(tmp_path):  # S8.18
    count = slots(500_000)
    open_slab(tmp_path, slots=count, nbytes=500_000).close()
    assert sum(path.lstat().st_blocks * 512 for path in tmp_path.rglob("*")) <= 500_000


def test_all_ranks_together_have_it():
    assert slots(4 * (5 * SLOT + FEW), ranks=4) == 5


def test_a_tier_holds_twice_the_host():
    least = 6 * SLOT + FEW
    assert slots(least, host_blocks=3) == 6
    with pytest.raises(ConfigurationError, match=f"at least {least} bytes"):
        slots(least - 1, host_blocks=3)
