"""The studies that the reports ask for, and those that their contradictions call for.

Each is a short derivation from a published run: most from A1, so that they compare with one another and with
the baselines. What a study does not change, it inherits, with what is assumed there.
"""

from some_moe.lab.registry.ablations_gravity import DEPTH_STUDIES, MOVEMENT_STUDIES
from some_moe.lab.registry.ablations_model import BACKBONE_STUDIES, LIBRARY_STUDIES, MVP_STUDIES, ROUTING_STUDIES
from some_moe.lab.registry.ablations_protocol import PROTOCOL_STUDIES
from some_moe.lab.registry.records import Experiment

STUDIES: tuple[Experiment, ...] = (
    *MVP_STUDIES,
    *PROTOCOL_STUDIES,
    *DEPTH_STUDIES,
    *MOVEMENT_STUDIES,
    *ROUTING_STUDIES,
    *LIBRARY_STUDIES,
    *BACKBONE_STUDIES,
)
