"""The command line: one module per subcommand, each imported only when it is called."""
