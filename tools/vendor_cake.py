"""`cake vendor` for a checkout in which nothing is installed.

python3 tools/vendor_cake.py self gdn
python3 tools/vendor_cake.py check
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "packages" / "cake-core" / "src"))

from cake.core.cli import main

if __name__ == "__main__":
    sys.exit(main(["vendor", *sys.argv[1:]]))
