"""``python -m distprune``: the command line, under torchrun too."""

from distprune.cli.main import main

if __name__ == "__main__":
    main()
