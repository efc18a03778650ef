"""What the notebook imports is there; `test_examples.py` runs it."""

import ast
import importlib
import json
import pathlib
import types

NOTEBOOK = pathlib.Path(__file__).parents[1] / "examples" / "index_refresh.ipynb"


def test_names_of_this_package_in_the_notebook_exist():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    tree = ast.parse("\n".join(code))
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "realm_jax" in str(node.module):
            for alias in node.names:
                module = importlib.import_module(str(node.module))
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = getattr(module, alias.name)
    used = [
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and isinstance(names.get(node.value.id), types.ModuleType)
    ]
    assert used
    assert [pair for pair in used if not hasattr(names[pair[0]], pair[1])] == []
