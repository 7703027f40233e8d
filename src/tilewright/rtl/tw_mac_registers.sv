// M registers: two halves of HALF_ROWS rows of N accumulators (microarchitecture.md, "MAC array").
// One row a cycle takes a sum, starting from its content or from zero; the vector unit reads another
// in the same cycle, without a clock.
module tw_mac_registers
  import tw_pkg::*;
#(
    parameter int unsigned SUM_BITS = 16 + $clog2(N),
    parameter int unsigned ROW_BITS = $clog2(HALF_ROWS)
) (
    input logic clk,
    input logic add,
    input logic half,
    input logic [ROW_BITS-1:0] row,
    input logic clear,  // start from zero
    input logic saturate,
    input logic signed [SUM_BITS-1:0] sum[N],
    input logic read_half,
    input logic [ROW_BITS-1:0] read_row,
    output logic [N*32-1:0] read_data
);
  logic [N*32-1:0] m_q[2**(ROW_BITS+1)];

  assign read_data = m_q[{read_half, read_row}];

  always_ff @(posedge clk) begin
    if (add) begin
      logic [N*32-1:0] old, next;
      old = clear ? '0 : m_q[{half, row}];
      for (int unsigned c = 0; c < N; c++) begin
        logic [31:0] total;
        logic overflow;
        total = old[32*c+:32] + 32'(sum[c]);
        // The operands' signs are equal and the result's is another.
        overflow = old[32*c+31] == sum[c][SUM_BITS-1] && total[31] != old[32*c+31];
        if (saturate && overflow) total = {old[32*c+31], {31{!old[32*c+31]}}};
        next[32*c+:32] = total;
      end
      m_q[{half, row}] <= next;
    end
  end
endmodule
