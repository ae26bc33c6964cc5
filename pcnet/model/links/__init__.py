"""The kinds of link, one a file."""

from pcnet.model.links.base import AnyLink, Link, LinkStyle
from pcnet.model.links.drives import Drives
from pcnet.model.links.parametrises import Parametrises
from pcnet.model.links.predicts import Predicts
from pcnet.model.links.weighs import Weighs

__all__ = ["AnyLink", "Drives", "Link", "LinkStyle", "Parametrises", "Predicts", "Weighs"]
