// tw_enable: enable of a slower clock derived from the core clock.
//
// Implements "Clock enables" of docs/concepts/microarchitecture.md: an accumulator of MHZ modulo
// the core clock. `enable` is a function of the state only; it steps in cycles with `run`.

module tw_enable import tw_pkg::*; #(
    parameter int unsigned MHZ = 1
) (
    input  logic clk,
    input  logic rst,
    input  logic run,
    output logic enable
);
  if (MHZ > CORE_MHZ) begin : gen_too_fast
    $error("DDR and DMA clocks must not be faster than the core clock");
  end

  localparam int unsigned BITS = $clog2(2 * CORE_MHZ);

  logic [BITS-1:0] rest_q;
  wire [BITS-1:0] sum = rest_q + BITS'(MHZ);

  assign enable = sum >= BITS'(CORE_MHZ);

  always_ff @(posedge clk) begin
    if (rst) rest_q <= '0;
    else if (run) rest_q <= enable ? sum - BITS'(CORE_MHZ) : sum;
  end
endmodule
