"""ATOM's OpenAI server with the connector registered, in this process and in those that ATOM spawns:

python -m connector.atom.serve --model MODEL --kv-transfer-config '{"kv_connector": "cpu_prefix_cache",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 51539607552}}'

All other arguments are those of `python -m atom.entrypoints.openai_server`.
"""

from connector.atom.plugin import register

register()  # at the top level: the processes that ATOM spawns import this module, too

if __name__ == "__main__":
    from atom.entrypoints.openai_server import main
    from atom.utils import set_ulimit

    set_ulimit()  # as ATOM's own entry point does
    main()
