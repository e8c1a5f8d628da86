"""``python -m jaxdraft.evaluation``: lm-eval's command line with ``--model jaxdraft``."""

from jaxdraft.evaluation.harness import main

if __name__ == "__main__":
    main()
