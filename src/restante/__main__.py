"""`python -m restante` is the `restante` command."""

from restante.cli.main import main

main()
