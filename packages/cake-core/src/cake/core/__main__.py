"""``python -m cake.core`` is the `cake` command."""

from cake.core.cli import main

raise SystemExit(main())
