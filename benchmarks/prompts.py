"""Ten code and ten prose prompts for the benchmark scripts."""

CODE = (
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    if argv is None:\n        argv = sys.argv\n",
    "    def test_append(self):\n        a = [1, 2, 3]\n        a.append(4)\n        self.assertEqual(",
    "def parse_args():\n    parser = argparse.ArgumentParser(description='Copy files')\n    parser.add_argument(",
    "for name in sorted(names):\n    value = getattr(module, name)\n    if callable(value):\n",
    'class Error(Exception):\n    """Base class for exceptions in this module."""\n\n\nclass ParsingError(Error):\n',
    "def fibonacci(n):\n    a, b = 0, 1\n    result = []\n    while a < n:\n",
    "try:\n    from collections import OrderedDict\nexcept ImportError:\n",
    "    def __repr__(self):\n        return '%s(%r)' % (self.__class__.__name__,",
)

PROSE = (
    "It was a cold evening in November, and the old house at the end of the lane ",
    '"I do not understand you," said the young lady, turning towards the window. "',
    "The captain looked out over the sea and said nothing for a long time. ",
    "Mr. Harding had been a clergyman in the county for more than thirty years, and ",
    "When they came to the river they found that the bridge had been ",
    "She had never seen her father so angry as he was on that morning, ",
    "The road from the village to the town runs for some miles through a forest, and ",
    '"Good morning, sir," said the landlord. "You have come a long way, I think, ',
    "There was once a poor man who lived with his wife and three sons in ",
    "He opened the letter slowly, for he knew the hand in which it was written, and ",
)
