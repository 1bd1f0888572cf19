"""Run the notebook's cells without Jupyter, as a script.

python run.py
"""

import json
import os
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")  # draws without a screen

import matplotlib.pyplot as plt


def main() -> None:
    os.chdir(Path(__file__).parent)
    notebook = json.loads(Path("sizing.ipynb").read_text(encoding="utf-8"))
    plots = []
    plt.show = lambda: plots.append(plt.gcf()) or plt.close()
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    print(f"{len(plots)} plots drawn")
    assert all(plot.axes[0].lines for plot in plots)


if __name__ == "__main__":
    main()
