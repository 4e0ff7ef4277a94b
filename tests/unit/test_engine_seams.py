"""One file for each engine knows what its pool of blocks is made of: no other file of its connector names that."""

import ast
from pathlib import Path

import pytest

CONNECTORS = Path(__file__).parents[2] / "src" / "connector"
KNOWS = {
    "vllm/pool_view.py": """
        block_hash cached_block_hash_to_block fake_free_list_head fake_free_list_tail free_block_queue free_blocks
        get_block_hash get_new_blocks get_num_free_blocks get_one_block iter_blocks_after make_block_hash_with_group_id
        next_free_block num_free_blocks prev_free_block ref_cnt reset_prefix_cache
    """,
    "atom/pool_view.py": """
        _cached _free _hash_to_block_id _protected _raw_unit_owner _reused _used _vacant ref_count reserve_units
        release_units
    """,
    "atom/states.py": """
        _lru _new_identity _pending _pending_by_hash _queued_restores _release_restore_pin hash_to_checkpoint
    """,
}


def names(file: Path) -> set[str]:
    """The attributes, the imports and the texts in a file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.mark.parametrize("knowing", KNOWS)
def test_one_file_names_what_an_engine_keeps_for_itself(knowing):
    private, engine = set(KNOWS[knowing].split()), knowing.split("/")[0]
    others = {file: names(file) & private for file in (CONNECTORS / engine).rglob("*.py")}
    assert others.pop(CONNECTORS / knowing) == private
    assert not {file.name: named for file, named in others.items() if named}
