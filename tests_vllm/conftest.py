import logging
import os

# Nothing here needs a network, a second thread, or the engine's chatter.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

logging.getLogger("vllm").setLevel(logging.ERROR)
