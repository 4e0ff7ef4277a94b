"""Tools around the library, none of which it imports: the command `cpu-prefix-cache`, and what its subcommands do."""
