"""`python -m exl3_dflash`: the same program as the console script."""

from exl3_dflash.cli.app import main

main()
