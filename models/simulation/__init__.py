"""Discrete-event simulation of a deployment: the analytic model's step times, played forward call by call."""

from breakeven.models.simulation.machine import Machines as Machines
from breakeven.models.simulation.machine import Window as Window
from breakeven.models.simulation.machine import machines as machines
from breakeven.models.simulation.machine import plan as plan
from breakeven.models.simulation.replications import Estimate as Estimate
from breakeven.models.simulation.replications import Replications as Replications
from breakeven.models.simulation.simulation import Bounds as Bounds
from breakeven.models.simulation.simulation import Simulated as Simulated
from breakeven.models.simulation.simulation import simulate as simulate
from breakeven.models.simulation.traffic import Load as Load
from breakeven.models.simulation.traffic import Traffic as Traffic
from breakeven.models.simulation.traffic import call_s as call_s
from breakeven.models.simulation.traffic import fork_s as fork_s
from breakeven.models.simulation.traffic import replay as replay
from breakeven.models.simulation.traffic import traffic as traffic
