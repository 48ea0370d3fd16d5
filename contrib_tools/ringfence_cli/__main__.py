"""``python -m ringfence_cli``."""

from ringfence_cli.main import main

if __name__ == "__main__":
    main()
