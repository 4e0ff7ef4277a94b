from importlib.util import find_spec
from weakref import WeakKeyDictionary

import pytest

import tests.support.interpreter  # noqa: F401


@pytest.fixture(autouse=True, scope="session")
def _one_trial_of_each_model():
    """Memory of the trials that a model passed as it was loaded: tests share models, and each trial takes some 40
    forward passes. The trials themselves are tested in test_continuing.py, where nothing is remembered.
    """
    if find_spec("torch") is None:  # then tests of transformers are left out
        yield
        return
    from connector.transformers import host_prefix_cache

    passed = WeakKeyDictionary()
    trial = host_prefix_cache.takes_several

    def takes_several(model, max_model_len):
        of_model = passed.setdefault(model, {})
        if max_model_len not in of_model:
            of_model[max_model_len] = trial(model, max_model_len)
        return of_model[max_model_len]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_prefix_cache, "takes_several", takes_several)
        yield
