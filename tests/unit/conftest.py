import tests.support.interpreter  # noqa: F401
