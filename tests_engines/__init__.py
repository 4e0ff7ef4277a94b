"""The engines of `examples/` with our host cache, beside the same engines without."""
