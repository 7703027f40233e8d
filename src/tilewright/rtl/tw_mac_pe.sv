// A processing element: two weights (one in use, one being loaded), a multiplier, an adder in its
// column's chain (microarchitecture.md, "MAC array"; the array's form with PE_FORM = 1).
module tw_mac_pe
  import tw_pkg::*;
#(
    parameter int unsigned SUM_BITS = 16 + $clog2(N)
) (
    input logic clk,
    input logic load,
    input logic load_set,
    input logic [7:0] load_weight,
    input logic set,  // of weights in use
    input logic weight_unsigned,  // planted fault
    input logic signed [7:0] activation,
    input logic signed [SUM_BITS-1:0] sum_in,  // from the element above
    output logic signed [SUM_BITS-1:0] sum_out
);
  logic [7:0] weight_q[2];
  logic signed [8:0] weight;
  assign weight = $signed({weight_q[set][7] && !weight_unsigned, weight_q[set]});
  assign sum_out = sum_in + SUM_BITS'(activation) * SUM_BITS'(weight);

  always_ff @(posedge clk) begin
    if (load) weight_q[load_set] <= load_weight;
  end
endmodule
