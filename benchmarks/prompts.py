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

MORE_CODE = (
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def __eq__(self, o):\n",
    "def copy_file(source, target):\n    with open(source, 'rb') as f:\n        data = f.read()\n    with open(",
    "import json\nimport logging\n\nlogger = logging.getLogger(__name__)\n\n\ndef load_config(path):\n",
    "    def setUp(self):\n        self.path = tempfile.mkdtemp()\n\n    def tearDown(self):\n",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n",
    "while True:\n    line = sys.stdin.readline()\n    if not line:\n        break\n    ",
    "    @property\n    def name(self):\n        return self._name\n\n    @name.setter\n",
    "if __name__ == '__main__':\n    import doctest\n    ",
    "async def fetch(url, timeout=10):\n    reader, writer = await asyncio.open_connection(",
    "DAYS = ['Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday']\nMONTHS = [",
)

MORE_PROSE = (
    "The next morning the doctor came early, and found his patient sitting by the fire, ",
    "It is a truth that few men like to be told, that ",
    "The children ran down to the beach, where the boats lay upon the sand, and ",
    '"If you had told me this a year ago," he said at last, "I should have ',
    "My uncle was a tall, thin man with grey hair and a voice that ",
    "In the middle of the night there was a knock at the door, and ",
    "The king sent for his three wisest counsellors and said to them: ",
    "Nothing could be pleasanter than the garden on a summer evening, when ",
    "They walked on together in silence until they came to the church, and then ",
    "Of all the ships that lay in the harbour there was none so ",
)
