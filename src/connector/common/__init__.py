"""Parts that connectors of several engines have alike: options, flags of a request, deadlines, an engine's contract.

They know no engine.
"""
