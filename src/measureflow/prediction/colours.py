"""One colour for each method, told apart by everyone (Okabe and Ito, 2008)."""

#: The colour-blind safe palette of Okabe and Ito, one colour per method throughout.
COLOURS = {"DE": "#E69F00", "DLE": "#0072B2", "DRE": "#CC79A7", "DRLE": "#009E73", "FD-GVI": "#D55E00"}
