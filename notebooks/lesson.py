"""Shared code of the notebooks: one look for all plots, text for those who cannot see them, and sliders."""

import base64
import hashlib
import html
import io
import json
from typing import Any, Final

import matplotlib
import plotly.graph_objects as go
from IPython.display import display
from matplotlib.figure import Figure

STOCK: Final = "#d1603d"
"""The color of what XLA chooses by itself."""
DETJAX: Final = "#2a7f8e"
"""The color of what is under contract."""
INK: Final = "#262626"
GREY: Final = "#767676"

_RESOLUTION: Final = 110
"""Dots per inch of the images in the notebooks: sharp enough, and tens of kilobytes each."""


def set_style() -> None:
    """Gives all plots of a notebook the lesson's look. Call it in the first cell."""
    matplotlib.rcParams.update(
        {
            "figure.figsize": (9, 3.6),
            "figure.facecolor": "white",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": GREY,
            "axes.labelcolor": INK,
            "axes.titlelocation": "left",
            "axes.titlesize": 11.5,
            "axes.titleweight": "bold",
            "axes.prop_cycle": matplotlib.cycler(color=[STOCK, DETJAX, "#e0a83e", "#6b5b95", GREY]),
            "xtick.color": GREY,
            "ytick.color": GREY,
            "legend.frameon": False,
        }
    )


def show(figure: Figure, alt: str) -> None:
    """Displays a plot of matplotlib as an image.

    Args:
        figure: the plot; make it with `matplotlib.figure.Figure` or `matplotlib.pyplot.subplots`.
        alt: what the plot shows, in a sentence, for readers who do not see it.
    """
    png = {"image/png": _png(figure), "text/plain": alt}
    display(png, raw=True, metadata={"image/png": {"alt": alt}})


def show_slider(figure: go.Figure, still: Figure, alt: str) -> None:
    """Displays a plot of plotly whose sliders work, and an image where they cannot.

    Jupyter and VS Code draw the plot themselves. A web page draws it if it has loaded plotly.js, as `window.Plotly`;
    without it, the page shows the image, which is in the notebook. Nothing is loaded from a network.

    Args:
        figure: the plot with its sliders.
        still: a plot of matplotlib that shows one position of the sliders.
        alt: what the plot shows, in a sentence.
    """
    figure.update_layout(
        template="plotly_white", font={"color": INK}, margin={"l": 60, "r": 20, "t": 60, "b": 40}, height=430
    )
    # The template covers every kind of plot; only its layout is needed here.
    figure.update_layout(template={"layout": figure.layout.template.layout.to_plotly_json()})
    content = json.loads(figure.to_json())
    bundle = {
        "application/vnd.plotly.v1+json": content,
        "text/html": _page(content, _png(still), alt),
        "text/plain": alt,
    }
    display(bundle, raw=True)


def _png(figure: Figure) -> str:
    """The image of a plot in base64. Its file says nothing about when and with what it was made."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_RESOLUTION, bbox_inches="tight", metadata={"Software": None})
    return base64.b64encode(file.getvalue()).decode()


def _page(content: dict[str, Any], png: str, alt: str) -> str:
    """A piece of HTML with the image, and a script that puts the plot in its place where there is plotly.js."""
    text = json.dumps({key: content[key] for key in ("data", "layout")}, separators=(",", ":")).replace("</", "<\\/")
    name = "plot-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    image = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{png}" style="max-width:100%">'
    return f"""<div id="{name}">{image}</div>
<script>
(() => {{
  const content = {text};
  const draw = () => {{
    const place = document.getElementById("{name}");
    if (!place || !window.Plotly) return;
    place.replaceChildren();
    window.Plotly.newPlot(place, content.data, content.layout, {{responsive: true, displayModeBar: false}});
  }};
  if (document.readyState === "complete") draw(); else window.addEventListener("load", draw);
}})();
</script>"""
