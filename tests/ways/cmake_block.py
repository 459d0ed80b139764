"""Makes the CMake block of a page a project: cmake_block.py PAGE FOLDER"""

import json
import sys
from pathlib import Path

from image import CONFIG
from pages import only_block

page, folder = Path(sys.argv[1]), Path(sys.argv[2])
(folder / "models/qwen3").mkdir(parents=True)
(folder / "models/qwen3/config.json").write_text(json.dumps(CONFIG))
start = "cmake_minimum_required(VERSION 3.25)\nproject(trainer LANGUAGES CXX)\n"
(folder / "CMakeLists.txt").write_text(start + only_block(page, "cmake") + "\n")
