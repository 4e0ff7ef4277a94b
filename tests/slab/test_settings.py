"""What a user says of a tier, and how many slots it comes to."""

import logging

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.slab.settings import FileTier, parse_file_tier
from cpu_prefix_cache.slab.sizing import num_slots
from tests.slab.small_slab import BLOCK, Letters, namespace, open_slab

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
def test_a_text_that_names_none_says_what_would(text, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_file_tier(text)


def test_sizes_have_binary_and_decimal_units():
    assert [parse_bytes(text) for text in ("7", "7B", "1KiB", "1kb", "2 MiB", "1.5TB", "1P")] == [
        *(7, 7, 1024, 1000, 2 << 20, 1_500_000_000_000, 10**15),
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
def test_what_names_no_weights_is_refused(fields):
    with pytest.raises(ConfigurationError, match=r"of a tier is a text|leave one of them out"):
        FileTier("/nvme", 1, **fields)


def test_a_path_is_a_text():
    with pytest.raises(ConfigurationError, match="path of a folder"):
        FileTier("", 1)


# Slots


def slots(path, nbytes, ranks=1, host_blocks=2, **fields):
    return num_slots(FileTier(str(path), nbytes), namespace(**fields), BLOCK, ranks, host_blocks)


def test_records_and_small_files_are_in_the_bound(tmp_path):  # S8.18
    assert slots(tmp_path, 10 * SLOT + FEW) == 10
    assert slots(tmp_path, 10 * SLOT + FEW - 1) == 9


def test_what_is_on_the_disk_is_in_the_bound(tmp_path):  # S8.18
    count = slots(tmp_path, 500_000)
    open_slab(tmp_path, slots=count, nbytes=500_000).close()
    assert sum(path.lstat().st_blocks * 512 for path in tmp_path.rglob("*")) <= 500_000


def test_all_ranks_together_have_it(tmp_path):
    assert slots(tmp_path, 4 * (5 * SLOT + FEW), ranks=4) == 5


def test_a_tier_holds_twice_the_host(tmp_path):
    least = 6 * SLOT + FEW
    assert slots(tmp_path, least, host_blocks=3) == 6
    with pytest.raises(ConfigurationError, match=f"at least {least} bytes"):
        slots(tmp_path, least - 1, host_blocks=3)


def test_other_folders_are_named_and_count(tmp_path, caplog):  # S8.17
    open_slab(tmp_path, named=namespace(model="old/model")).close()
    (tmp_path / "lost+found").mkdir()  # none of ours
    old = tmp_path / namespace(model="old/model").folder
    taken = sum(path.lstat().st_blocks * 512 for path in old.rglob("*"))
    with caplog.at_level(logging.WARNING):
        assert slots(tmp_path, taken + 7 * SLOT + FEW) == 7
    (record,) = caplog.records
    assert str(old) in record.getMessage()
    assert "'old/model'" in record.getMessage()
    assert slots(tmp_path, taken + 7 * SLOT + FEW - 1) == 6
    assert "lost" not in record.getMessage()


def test_other_folders_that_leave_too_little_are_named(tmp_path):
    open_slab(tmp_path, named=namespace(model="old")).close()
    with pytest.raises(ConfigurationError, match=r"'old'.* may be deleted.*give the tier at least"):
        slots(tmp_path, 3 * SLOT + FEW)


def test_a_folder_that_exists_keeps_its_slots(tmp_path):  # S8.17
    Letters(tmp_path, slots=7, nbytes=10**6).slab.close()
    assert slots(tmp_path, 10**6) == 7


def test_a_folder_of_another_size_is_refused(tmp_path):
    open_slab(tmp_path, nbytes=10**6).close()
    with pytest.raises(ConfigurationError, match=r"1000000 bytes, and 2000000 .* delete the folder"):
        slots(tmp_path, 2 * 10**6)


def test_ranks_that_disagree_are_refused(tmp_path):
    for rank in range(2):
        open_slab(tmp_path, rank=rank, ranks=2, slots=4 + rank).close()
    with pytest.raises(ConfigurationError, match="different numbers of slots"):
        slots(tmp_path, 10**6, ranks=2)


def test_a_path_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="make the folder"):
        slots(tmp_path / "none", 10**6)
