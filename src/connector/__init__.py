"""Everything that speaks to somebody else's software: one package per engine. It translates and decides nothing."""
