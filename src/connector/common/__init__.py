"""Parts that connectors of several engines have alike: options, flags of a request, deadlines. Knows no engine."""
