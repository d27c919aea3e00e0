import sys
from pathlib import Path

# The tests share helpers; importlib mode puts no folder of tests on the path.
sys.path.insert(0, str(Path(__file__).parent))
