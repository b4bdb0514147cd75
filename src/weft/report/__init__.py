"""Run folders for people: a page, a live page, figures for a paper, tables in a terminal. Nothing here loads torch.

reading.py                    run folders and checkpoints as dataclasses
facts.py                      means over clients and seeds, attention, gain
learning.py, sharing.py       lines, bars and heat maps as data, each with a sentence
charts.py, matplotlib.py      what a chart is; the two renderers: Plotly and matplotlib
page.py, watch.py             the page, and the page of a run in progress
terminal.py, trackers.py      rich tables; TensorBoard
"""
