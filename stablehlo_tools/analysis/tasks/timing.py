from stablehlo_tools.cost.clock import Clock as Clock
from stablehlo_tools.cost.clock import Measured as Measured
